"""Triton's protocol, with the models of the C++ batch manager's backend."""
