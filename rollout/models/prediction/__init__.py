"""Heads that guess the policy's next tokens by its hidden states: what drafts, beside whole models.

``head`` is what all have; ``mtp_head`` is of a release's own layers behind its last, ``eagle_head``
of EAGLE-3's checkpoints, whose fields ``eagle_config`` reads.
"""
