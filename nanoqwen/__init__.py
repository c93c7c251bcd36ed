"""nanoqwen: from a plain PyTorch Qwen2.5-Coder decoder to the GPU's bandwidth limit."""

__version__ = "0.1.0"
