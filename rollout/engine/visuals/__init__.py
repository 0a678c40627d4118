"""Images of prompts: read, cut into patches, placed among tokens, and their features kept."""
