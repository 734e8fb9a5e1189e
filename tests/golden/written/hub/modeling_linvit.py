"""Lets transformers' Auto classes load the network of this folder with trust_remote_code=True.

`linvit push` puts this file next to the weights. It imports linvit, which has to be installed: without the import timm
does not know the network. The classes have the names of transformers' own, which its pipelines look for.
"""

import transformers

import linvit.models  # noqa: F401 - registers the networks with timm


class TimmWrapperModel(transformers.TimmWrapperModel):
    """The network without its classifier."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: weights are saved under timm's names, as transformers does for its own classes only."""
        return False


class TimmWrapperForImageClassification(transformers.TimmWrapperForImageClassification):
    """The classifier."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """See TimmWrapperModel."""
        return False
