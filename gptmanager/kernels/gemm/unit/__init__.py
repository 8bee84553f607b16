"""Matmuls by a matrix unit that multiplies bytes (Intel's AMX)."""
