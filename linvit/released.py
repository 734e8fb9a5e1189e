"""The authors' published weights."""


def load_released(model, source):
    raise NotImplementedError
