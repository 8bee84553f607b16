"""Triton's protocol: clients of the C++ batch manager's backend find their models here."""
