class StructuredOutputsParams:
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("this stand-in has no engine")
