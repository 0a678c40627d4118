"""Layers that models are made of: each has its parameters and declares the slots that fill them.

Ranks share a layer by ``TensorParallel``, which it gets as an argument (``base.Build``); its
products and attention are ops of ``kernels``. What is composed of layers is in ``decoder``.
"""
