"""Serves Triton's protocol over HTTP and gRPC, with the models of the TensorRT-LLM backend."""
