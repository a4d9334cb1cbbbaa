"""What the reference needs of modules that are not there yet."""


def evaluate(problem, scores):
    raise NotImplementedError("score_mod: not supported by cupyflash.reference yet")


def evaluate_mask(problem):
    raise NotImplementedError("mask_mod: not supported by cupyflash.reference yet")
