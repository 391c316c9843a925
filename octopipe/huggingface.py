from octopipe.model import ModelSpec
def from_config(source, *, name=None, where=None) -> ModelSpec:
    raise NotImplementedError
