"""What a decoder of ours is composed of, above single layers; ``causal_lm.py`` puts it together.

Blocks and the mixtures of experts in them, all blocks of a step in one native call, attention
within chunks, the groups of layers that share pages of the KV cache, and the tower that encodes
images for one that sees them (``vision_lm.py``).
"""
