"""Whether an error says that the memory of a processor or a GPU is used up."""

CPU_WORDS = "can't allocate memory"  # of the plain RuntimeError that PyTorch raises for the processor's memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is used up, in the words of Python or of PyTorch."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and CPU_WORDS in str(error)
