"""A CUDA device that is none: tensors hold host memory, kernels run in Triton's interpreter.

``install()`` replaces, for the whole process, what torch says of CUDA. What it then shows is
what Python code does: which tensors lie where, what meets on which device, what a captured graph
holds. It refuses what a card refuses: tensors of two devices in one operation, numpy views of
device memory, and anything that waits for the device while a graph is captured. A graph records its
operations with the memory that they were given, and a replay runs them on that memory, so an
address that has moved gives stale values, as on a card. A copy that need not be waited for arrives
when somebody waits for its stream: until then host memory holds what is wrong, and pinned memory
that is read must not change. A thread has a current stream and a current device of its own: a new
one's is the first GPU, also where the process works on another. Work is done at once, in the
order in which it is asked for; what two streams do to the same memory is refused where nothing
orders it (``order``), and a test may have a stream do something late.

``sitecustomize.py`` beside this package installs it in every process that has their folder on its
path.
"""
