"""The pages of docs/reference/ that are made from the code, and the names of parsers.

`python scripts/generate_reference.py` writes them; `--check` fails when a page is not current.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # not the checkout installed

from scripts.chart_page import chart_page
from scripts.generated_files import ROOT, write_or_check
from tokenmesh.cli.flags import FLAGS, UP_FLAGS
from tokenmesh.cli.vllm_flags import FIXED
from tokenmesh.engine.exec.features import FEATURES, KINDS
from tokenmesh.services.gateway.apis.openai.request import ChatRequest, CompletionRequest
from tokenmesh.services.gateway.apis.openai.sampling_fields import NotServed, SamplingFields, marked
from tokenmesh.services.gateway.apis.pooling import fields as pooling
from tokenmesh.services.gateway.parsers.reasoning import REASONING
from tokenmesh.services.gateway.parsers.registry import TOOLS
from tokenmesh.shared.config.layers import Key, environment_name, fields, is_section
from tokenmesh.shared.metrics.table import METRICS, PREFIX
from tokenmesh.shared.subject_table import SUBJECTS

FOLDER: Final = ROOT / "docs/reference"
PARSER_NAMES: Final = ROOT / "tokenmesh/shared/built_in_parsers.py"
NOTE: Final = "<!-- Written by scripts/generate_reference.py; edit the code instead. -->\n"
_TYPE_NAMES: Final[dict[type, str]] = {
    str: "text", int: "integer", float: "number", bool: "boolean", SecretStr: "secret"
}  # fmt: skip
_BOUND_SIGNS: Final = {
    "minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"
}  # fmt: skip


def features_page() -> str:
    """Settings that not every worker takes, and which kinds of workers refuse them."""
    lines = [
        NOTE,
        "# Features by kind of worker\n",
        "Most settings work for every model on every device. A worker refuses these at its start, "
        "with the setting and the reason, where this table says so. What a model itself lacks is "
        "in [models](../models.md), what no worker does in [limits](../limits.md).\n",
        f"| setting | value | {' | '.join(map(str, KINDS))} |",
        "|---|---|---|---|---|---|",
    ]
    for feature in FEATURES:
        cells = ["no" if kind in feature.refused else "yes" for kind in KINDS]
        lines.append(f"| `{feature.key}` | {feature.values} | {' | '.join(cells)} |")
    lines += ["", "| setting | why not |", "|---|---|"]
    for feature in FEATURES:
        lines += [f"| `{feature.key}` | {why} |" for why in dict.fromkeys(feature.refused.values())]
    return "\n".join(lines) + "\n"


def config_page() -> str:
    """Every setting: its key, variable, type, bounds, default and meaning."""
    lines = [
        NOTE,
        "# Settings\n",
        "Flags win over variables, variables over the file (`--config FILE`, TOML), the file over "
        "these defaults. An unknown key is an error. The variable of `gateway.port` is "
        f"`{environment_name(('gateway', 'port'))}`; lists are JSON or separated by commas.\n",
        "`[model]` (or `TOKENMESH_MODEL__*`) describes the one model of a mesh; several are a "
        "list of tables `[[models]]` with the same keys.",
    ]
    for key, field in fields():
        if is_section(field):
            about = inspect.getdoc(field.annotation) or ""
            lines += ["", f"## {'.'.join(key)}", "", about, *_table_head()]
        elif key == ("model", "model"):
            lines += ["", "## model", *_table_head(), _row(key, field)]
        elif len(key) > 1:
            lines.append(_row(key, field))
    return "\n".join(lines) + "\n"


def flags_page() -> str:
    """Every flag of `up` and `serve`, and the setting it sets."""
    lines = [
        NOTE,
        "# Flags of `tokenmesh up` and `tokenmesh serve`\n",
        "A flag that vLLM has too means the same here. `up` alone has those marked with a star.\n",
        "| flag | setting | meaning |",
        "|---|---|---|",
    ]
    by_key = dict(fields())
    for flag in UP_FLAGS:
        star = "" if flag in FLAGS else " *"
        meaning = flag.help or by_key[flag.key].description or ""
        names = f"`{flag.name}`" + (f", `{flag.alias}`" if flag.alias else "")
        lines.append(f"| {names}{star} | `{'.'.join(flag.key)}` | {_cell(meaning)} |")
    lines += [
        "\n## Flags of vLLM without effect\n",
        "They ask for what TokenMesh does anyway. Another value of theirs, and any other flag of "
        "vLLM, is an error that names it and says what to do; switching off what does not exist "
        "here is none. A key of a flag that takes an object may be written behind a dot. "
        "As in vLLM a flag may be shortened as long as one flag alone begins so, and "
        "`VLLM_API_KEY` in the environment is an API key where nothing else names one, "
        "`VLLM_SERVER_DEV_MODE` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING` are taken as "
        "`--enable-admin-routes`, and `VLLM_SYSTEM_START_DATE` is the day that chat templates "
        "take for today. vLLM's `launch render` is `up --render-only`.\n",
        "| flag | values | because |",
        "|---|---|---|",
    ]
    for name, fixed in FIXED.items():
        listed = ", ".join(f"`{each}`" for each in fixed.values or ())
        values = "any" if fixed.values == () else listed
        lines.append(f"| `--{name}` | {values or 'none'} | {_cell(fixed.meaning)} |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric."""
    lines = [NOTE, "# Metrics\n", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        cells = f"{metric.kind} | {', '.join(metric.labels)} | {_cell(metric.help)}"
        lines.append(f"| `{PREFIX}:{metric.name}` | {cells} |")
    return "\n".join(lines) + "\n"


def subjects_page() -> str:
    """Every NATS subject."""
    lines = [
        NOTE,
        "# NATS subjects\n",
        "Model names are slugged (`shared/subjects.py`). A question is answered with what stands "
        "behind its arrow, or with `Failed`. [All messages](messages.md).\n",
        "| subject | who publishes | who listens | queue group | carries |",
        "|---|---|---|---|---|",
    ]
    for each in SUBJECTS:
        queue, senders = each.queue or "-", ", ".join(each.senders) or "-"
        row = (f"`{each.pattern}`", senders, each.listeners, queue, each.carries)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def messages_page() -> str:
    """Every message and what it is made of, one heading a file."""
    lines = [
        NOTE,
        "# Messages\n",
        "Encoded with msgpack. A message is a map with its name under `type`, and a field at its "
        "default is left out; what is marked *array* is an array of its fields in this order. A "
        "receiver ignores fields that it does not know. [Where they travel](subjects.md).",
    ]
    for path in sorted((ROOT / "tokenmesh/shared/messages").glob("[a-z]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        about = (ast.get_docstring(tree) or "").partition("\n")[0]
        lines += ["", f"## {path.stem}", "", about]
        # Values of the engine stand before the messages that carry them.
        values = ROOT / "tokenmesh/engine/api" / path.name
        if path.stem == "failed":
            values = ROOT / "tokenmesh/shared/failed.py"
        of_engine = ast.parse(values.read_text(encoding="utf-8")).body if values.exists() else []
        for node in (*of_engine, *tree.body):
            # A tuple with names is a value of this process, no part of a message.
            if isinstance(node, ast.ClassDef) and ast.unparse(node.bases[0]) != "NamedTuple":
                lines += _message(node)
    return "\n".join(lines) + "\n"


def fields_page() -> str:
    """Every field of requests to models that is served, with its range, default and meaning."""
    lines = [
        NOTE,
        "# Fields of requests\n",
        "Names, ranges and meanings are vLLM's where nothing else is said. Settings are those of "
        "`gateway`. [How to add one](../guides/add-a-sampling-field.md).",
    ]
    tables: list[tuple[str, type[BaseModel]]] = [
        ("Chats and completions", SamplingFields),
        ("Chats only", ChatRequest),
        ("Completions only", CompletionRequest),
        ("Embeddings, pooling, classes, scores, reranking", pooling.PromptFields),
        ("Embeddings, pooling and classes", pooling.InputFields),
        ("Embeddings and pooling", pooling.NumberFields),
        ("Pooling only", pooling.PoolingRequest),
        ("Scores and reranking", pooling.ScoreFields),
        ("Scores only", pooling.ScoreRequest),
        ("Reranking only", pooling.RerankRequest),
        ("Cohere's embed", pooling.CohereEmbedRequest),
    ]
    for title, model in tables:
        bases = {each for _, each in tables} & {*model.__mro__[1:]}
        others = {name for base in bases for name in base.model_fields}
        refused = marked(model, NotServed)
        lines.append(f"\n## {title}\n\n| field | type | default | meaning |\n|---|---|---|---|")
        schemas = model.model_json_schema()["properties"]
        for name, field in model.model_fields.items():
            if name not in others and (name not in refused or field.description):
                kind, meaning = _cell(_json_type(schemas[name])), _cell(field.description or "")
                lines.append(f"| `{name}` | {kind} | {_default(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _json_type(schema: dict[str, Any]) -> str:
    """The type and the bounds of a JSON schema; null and bounds of 32 bits are left out."""
    if "anyOf" in schema:
        return " or ".join(_json_type(e) for e in schema["anyOf"] if e.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    kind: str = schema.get("type", "object")
    if kind == "array":
        return f"list of {_json_type(schema['items'])}"
    bounds = [
        f"{sign} {schema[name]}"
        for name, sign in _BOUND_SIGNS.items()
        if name in schema and abs(schema[name]) < 2**31 - 1
    ]
    return " ".join([{"string": "text"}.get(kind, kind), ", ".join(bounds)]).strip()


def _message(node: ast.ClassDef) -> Iterator[str]:
    options = {each.arg for each in node.keywords}
    array = " *array*" if "array_like" in options else ""
    yield f"\n### {node.name}{array}\n"
    yield _cell(ast.get_docstring(node) or "")
    fields_of = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    if fields_of:
        yield from ("", "| field | type | default | meaning |", "|---|---|---|---|")
    after = dict(zip(node.body, node.body[1:], strict=False))
    for field in fields_of:
        default = f"`{ast.unparse(field.value)}`" if field.value else "required"
        kind, meaning = _cell(ast.unparse(field.annotation)), _text(after.get(field))
        yield f"| `{ast.unparse(field.target)}` | `{kind}` | {default} | {meaning} |"


def _text(node: ast.stmt | None) -> str:
    """Return the text of a string that stands alone; empty for another statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return _cell(inspect.cleandoc(str(node.value.value)))
    return ""


def noted_chart_page() -> str:
    """Every value of the chart."""
    return f"{NOTE}\n{chart_page()}"


PAGES: Final = {
    "config.md": config_page,
    "features.md": features_page,
    "flags.md": flags_page,
    "metrics.md": metrics_page,
    "subjects.md": subjects_page,
    "messages.md": messages_page,
    "fields.md": fields_page,
    "chart.md": noted_chart_page,
}


def _table_head() -> Iterator[str]:
    yield ""
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"


def _row(key: Key, field: FieldInfo) -> str:
    kind = " ".join(filter(None, (_type_name(field.annotation), _bounds(field))))
    meaning = _cell(field.description or "")
    return f"| `{'.'.join(key)}` | {_cell(kind)} | {_default(field)} | {meaning} |"


def _type_name(annotation: object) -> str:
    arguments = [each for each in get_args(annotation) if each is not type(None)]
    if arguments and all(isinstance(each, str) for each in arguments):
        return " or ".join(f"`{each}`" for each in arguments)
    if get_origin(annotation) is Annotated:
        member, field = arguments
        return f"{_type_name(member)} {_bounds(field)}"
    if get_origin(annotation) is tuple:
        return f"list of {_type_name(arguments[0])}"
    if get_origin(annotation) is dict:
        return "table"
    if arguments:
        return " or ".join(map(_type_name, arguments))
    assert isinstance(annotation, type)
    return _TYPE_NAMES.get(annotation, annotation.__name__)


def _bounds(field: FieldInfo) -> str:
    parts = []
    for each in field.metadata:
        match each:
            case annotated_types.Ge(ge):
                parts.append(f">= {ge}")
            case annotated_types.Gt(gt):
                parts.append(f"> {gt}")
            case annotated_types.Le(le):
                parts.append(f"<= {le}")
            case annotated_types.Lt(lt):
                parts.append(f"< {lt}")
    return ", ".join(parts)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None or field.default in ((), {}, ""):
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"`{field.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def parser_names() -> str:
    """The names in the gateway's tables of parsers, for services that must not import them."""
    lines = ['"""Names of the built-in parsers, written by scripts/generate_reference.py."""']
    lines += ["", "from typing import Final", ""]
    for name, table in (("REASONING_PARSERS", REASONING), ("TOOL_PARSERS", TOOLS)):
        lines += [f"{name}: Final = (", *(f'    "{each}",' for each in sorted(table)), ")"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    pages = {FOLDER / name: page() for name, page in PAGES.items()}
    sys.exit(write_or_check(__doc__, {**pages, PARSER_NAMES: parser_names()}))
