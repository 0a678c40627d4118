"""LoRA adapters of a rank, beside the linears and routed experts of a model.

``slots`` has the slots of A and B that a step's rows use, ``model`` one adapter in its slot as a
model whose weights are loaded, read and digested; ``linear`` and ``experts`` are what lies beside
one of either, for all instances of a model, ``instance`` what follows of it from one instance's own
weights, ``away`` what a stage of a pipeline knows of the others', and ``pages`` has adapters in
host memory, from where those that serve are copied. It stands above ``layers``, which know it as
protocols alone.
"""
