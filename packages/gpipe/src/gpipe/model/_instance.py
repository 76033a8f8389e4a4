"""Let ``isinstance(pipe, type(model))`` be true. Hugging Face's libraries use it to save and load a model correctly.

Python checks the type of an object first, then its ``__class__``. ``unittest.mock`` and ``weakref.proxy`` rely on this.
So a pipe is an instance of :class:`gpipe.GPipe` and of the class of its model. Methods of the model that the pipe does
not have itself are called on the model, as before.
"""

from __future__ import annotations

from typing import Any

_of_any_object: Any = vars(object)["__class__"]


class InstanceOfModel:
    """An object that reports the class of its model as its own."""

    @property
    def __class__(self) -> Any:
        model = vars(self).get("_model")
        return _of_any_object.__get__(self) if model is None else model.__class__

    @__class__.setter
    def __class__(self, kind: type[Any]) -> None:
        _of_any_object.__set__(self, kind)
