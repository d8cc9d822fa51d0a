"""Every error that specdec raises on purpose: where, what was got, what was wanted, what to try.

Only these are shown without a traceback. `exit_code` is what the command line returns for the class.
"""


class SpecdecError(Exception):
    """Base of all errors that are the caller's to fix."""

    exit_code = 1


class RecipeError(SpecdecError, ValueError):
    """A recipe, or an option of a plugin, is not what was wanted. `problems` lists every one found."""

    exit_code = 2

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class PluginError(SpecdecError, LookupError):
    """A plugin is unknown, claimed twice, cannot be imported, or is not of the kind it says."""

    exit_code = 3


class ModelError(SpecdecError, ValueError):
    """A model or tokenizer cannot be loaded, or cannot be decoded exactly by this engine."""

    exit_code = 4


class CompatibilityError(SpecdecError, ValueError):
    """Target, drafter, verifier and scheduler do not fit each other. `problems` lists every reason."""

    exit_code = 5

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class RequestError(SpecdecError, ValueError):
    """A request cannot be served: an empty or too long prompt, a stop string without a tokenizer."""

    exit_code = 6


class DataError(SpecdecError, ValueError):
    """A data file is missing or malformed (the message names the line), or what judges completions is missing."""

    exit_code = 7


class OutputError(SpecdecError, OSError):
    """The output folder cannot be written, or holds something that would be lost."""

    exit_code = 8
