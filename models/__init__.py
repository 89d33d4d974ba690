"""The zoo: plain PyTorch reference models and their presets. Imports no other part of Cannopy."""
