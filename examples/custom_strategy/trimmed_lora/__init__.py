"""A robust LoRA rule and a client metric, without a fork of fedloom."""
