"""Kernels for a CPU, in C++, compiled at first use where a compiler is found."""
