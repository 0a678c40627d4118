"""What TRL imports of vLLM 0.30 on the trainer's side, over gloo instead of NCCL; nothing else.

TRL refuses to talk to a server unless this package can be imported. It is put on the path of the
test's trainer alone; the server never sees it.
"""

__version__ = "0.30.0"


class _Absent:
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("this stand-in has no engine")


class LLM(_Absent):
    pass


class RequestOutput(_Absent):
    pass


class SamplingParams(_Absent):
    pass
