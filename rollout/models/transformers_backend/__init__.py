"""What is known of a model of transformers before it runs here, and what its modules run over.

Its class or a checkpoint's own code, modules made without weights, a probe of what they cache, the
attention interface and a cache over our pages and slots, and plans that cut modules over ranks.
The model itself (``transformers_lm.py``) and its judge after a first load stand in the folder
above: they are built from a ``ModelConfig``, for which ``config`` asks this package.
"""
