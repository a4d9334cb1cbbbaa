"""What the reference needs of a user's expressions."""

try:
    from cupyflash._score_mod import evaluate, evaluate_mask
except ModuleNotFoundError:

    def evaluate(problem, scores):
        raise NotImplementedError("score_mod: not supported by cupyflash.reference yet")

    def evaluate_mask(problem):
        raise NotImplementedError("mask_mod: not supported by cupyflash.reference yet")


__all__ = ["evaluate", "evaluate_mask"]
