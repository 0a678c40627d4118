"""What a checkpoint's ``config.json`` says, read once and typed.

``model`` has ``ModelConfig``, which all else here is a part of or reads for: the sizes of one kind
of layer in a file each (``layer``, ``latent``, ``delta``, ``mamba``, ``moe``), the text model and
the tower of a multimodal file (``text``, ``vision``), labels of a score head, and fields that
depend on each other (``fields``). ``reader`` makes the errors that name field and file. It stands
above ``transformers_backend``, which is asked what nobody declares.
"""
