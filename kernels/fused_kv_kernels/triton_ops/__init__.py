"""The operators in Triton, one in each file; :mod:`fused_kv_kernels.dispatch` decides when they are used.

Importing a module of this package imports Triton. With ``TRITON_INTERPRET=1`` in the environment before the
first import of Triton, the kernels run on the CPU, slowly, for testing.
"""
