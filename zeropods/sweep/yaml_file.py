"""A YAML file as plain values; where it is wrong, its line is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropods.errors import UserError

if TYPE_CHECKING:
    from yaml import Node


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping that a YAML file holds.

    Raises:
        UserError: it is not there, is no YAML, holds no mapping, or holds a key twice, of which YAML's own
            reader would silently take the last.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        node = yaml.compose(text, yaml.SafeLoader)
        document = yaml.safe_load(text)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a matrix like matrices/demo.yaml") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}: line {line}: {error.problem}; mend the YAML") from None
    except RecursionError:
        raise UserError(f"{path}: lists in lists, deeper than a matrix can be; mend the YAML") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}; mend the YAML") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: {type(document).__name__}; expected keys with values, like repeats: 2")
    for key, line in _twice(node):
        raise UserError(f"{path}: line {line}: {key}: is there twice; leave one of them out")
    return document


def _twice(top: Node | None) -> Iterator[tuple[str, int]]:
    """Keys that a mapping holds more than once, with their lines; an alias may lead back to where it stands."""
    import yaml

    waiting, seen = [top], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = [str(key.value) for key, _ in node.value]
            for place, (key, _) in enumerate(node.value):
                if keys[place] in keys[:place]:
                    yield keys[place], key.start_mark.line + 1
            waiting += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
