"""A stand-in for SGLang's compiled kernels, which have no wheel for a CPU.

SGLang imports names from it at the start. Any name can be imported; none can be called. The tests
of the adapter never reach a kernel.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not there: this is a stand-in for tests")

    return missing
