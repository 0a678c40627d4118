"""One file for each architecture; the registry finds every ``Arch`` that a file here declares."""
