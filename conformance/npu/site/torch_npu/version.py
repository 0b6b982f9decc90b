"""The version of torch_npu whose surface and operator schemas are emulated."""

__version__ = "2.10.0"
