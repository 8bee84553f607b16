"""Tests of the server. A package, so that its server ends when a worker goes on elsewhere."""
