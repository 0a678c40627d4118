"""What the shared server of this folder was started with."""

TOKEN, CONTROL = "sampling-secret", "control-secret"
MAX_BODY = 1 << 20  # bytes
OPENED = "/health,/v1/models,/v1/completions"  # without a token, at a port of their own
