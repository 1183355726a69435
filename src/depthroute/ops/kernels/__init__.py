"""Triton kernels of the reads and their launchers: no autograd, no validation, no choice.

Importing a module of this package imports triton, so callers import them where they launch.
"""
