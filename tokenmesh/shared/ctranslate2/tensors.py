"""Variables of a Whisper in CTranslate2 -> the tensors of transformers' own checkpoint.

There the projections of one input are one matrix, whose rows are those of several here. Keys have a
bias of zeros that transformers leaves out; any other would not change a softmax either. Quantized
weights become numbers again: they were multiplied with their scale, one for each row or one for
all, and rounded.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tokenmesh.shared.ctranslate2.reader import Ct2File, Ct2Variable
from tokenmesh.shared.tensor_file import BYTES_BY_DTYPE
from tokenmesh.shared.unpacked import MadeTensor

if TYPE_CHECKING:
    import numpy as np

FLOATS: Final = ("F32", "F16", "BF16")
_SPECIFICATION: Final = "WhisperSpec"
_REVISION: Final = 3
_PIECE_BYTES: Final = 16 << 20
_FIXED: Final = {
    "decoder/activation": (3, "the activation of decoders other than GELU"),
    "decoder/alibi": (0, "attention with ALiBi"),
    "decoder/pre_norm": (1, "norms behind the layers"),
    "decoder/scale_embeddings": (0, "embeddings that are scaled"),
    "decoder/start_from_zero_embedding": (0, "a first embedding of zeros"),
    "decoder/alignment_heads": (None, ""),
    "decoder/alignment_layer": (None, ""),
    "decoder/num_heads": (None, ""),
    "encoder/num_heads": (None, ""),
}
"""Numbers that a file has besides tensors: the only value served, and what any other means."""
_HIDDEN_WORDS: Final = "embeddings, norms and layers"


class WhisperTensors:
    """The tensors of a file, each checked against the sizes that the first ones state."""

    def __init__(self, file: Ct2File) -> None:
        """Raises CheckpointError for another kind of model, and for one that is not computed."""
        self.file = file
        if file.specification != _SPECIFICATION:
            known = f"of CTranslate2's models {_SPECIFICATION} is served"
            raise file.error(f"it is a {file.specification}; {known}")
        if file.revision > _REVISION:
            known = f"revision {_REVISION} of {_SPECIFICATION} is the newest that is known"
            raise file.error(f"its revision is {file.revision}, and {known}")
        for name, (only, meaning) in _FIXED.items():
            found = self._number(name) if name in file.variables else only
            if only is not None and found != only:
                raise file.error(f"{name} is {found}: {meaning} is not served")
        self._read = set(_FIXED)
        self.vocab_size, self.hidden = self._matrix("decoder/embeddings/weight")
        self.target_positions, _ = self._matrix("decoder/position_encodings/encodings")
        self.source_positions, _ = self._matrix("encoder/position_encodings/encodings")
        conv = self._variable("encoder/conv1/weight").shape
        if len(conv) != 3:
            raise file.error(f"variable encoder/conv1/weight has shape {list(conv)}")
        self.mel_bins = conv[1]
        self.float_type = self._variable("decoder/layer_norm/gamma").dtype
        """The type of the norms; quantized weights become it."""
        if self.float_type not in FLOATS:
            raise file.error(f"variable decoder/layer_norm/gamma is of type {self.float_type}")

    def heads(self, part: str) -> int:
        """Return the number of heads of the encoder's or the decoder's attention."""
        found = self._number(f"{part}/num_heads")
        if found < 1 or self.hidden % found:
            raise self.file.error(f"{part}/num_heads is {found} for {self.hidden} columns")
        return found

    def layers(self, part: str) -> int:
        """Return the number of layers; one that is missing is noticed when its tensors are."""
        start = f"{part}/layer_"
        numbers = {
            int(number)
            for name in self.file.variables
            if name.startswith(start) and (number := name[len(start) :].split("/")[0]).isdecimal()
        }
        if not numbers or max(numbers) + 1 != len(numbers):
            raise self.file.error(f"it holds layers {sorted(numbers)[:5]} of the {part}")
        return len(numbers)

    def inner_size(self, part: str) -> int:
        return self._matrix(f"{part}/layer_0/ffn/linear_0/weight")[0]

    @property
    def is_tied(self) -> bool:
        """True where the output layer is the embedding."""
        name = "decoder/projection/weight"
        return self.file.aliases.get(name) == "decoder/embeddings/weight"

    def all(self) -> list[MadeTensor]:
        """Raises CheckpointError for a tensor that is missing, misshapen, left over or of a type
        that is not known."""
        found = list(self._all())
        unknown = [
            name
            for name in self.file.variables
            if name not in self._read and name.removesuffix("_scale") not in self._read
        ]
        if unknown:
            raise self.file.error(f"variable {sorted(unknown)[0]} is not known")
        return found

    def _all(self) -> Iterator[MadeTensor]:
        hidden = self.hidden
        for part, positions in (
            ("encoder", self.source_positions),
            ("decoder", self.target_positions),
        ):
            inner = self.inner_size(part)
            ours = f"model.{part}"
            yield from self._made(
                f"{part}/position_encodings/encodings",
                (positions, hidden),
                [f"{ours}.embed_positions.weight"],
            )
            yield from self._norm(f"{part}/layer_norm", f"{ours}.layer_norm")
            for number in range(self.layers(part)):
                yield from self._layer(
                    part, f"{part}/layer_{number}", f"{ours}.layers.{number}", inner
                )
        for name, inputs in (("conv1", self.mel_bins), ("conv2", hidden)):
            theirs, ours = f"encoder/{name}", f"model.encoder.{name}"
            yield from self._made(f"{theirs}/weight", (hidden, inputs, 3), [f"{ours}.weight"])
            yield from self._made(f"{theirs}/bias", (hidden,), [f"{ours}.bias"])
        shape = (self.vocab_size, hidden)
        yield from self._made(
            "decoder/embeddings/weight", shape, ["model.decoder.embed_tokens.weight"]
        )
        name = "decoder/projection/weight"
        if self.is_tied:
            self._read.add(name)
        else:
            yield from self._made(name, shape, ["proj_out.weight"])

    def _layer(self, part: str, theirs: str, ours: str, inner: int) -> Iterator[MadeTensor]:
        hidden = self.hidden
        names = ["q_proj", "k_proj", "v_proj"]
        within = f"{theirs}/self_attention"
        yield from self._norm(f"{within}/layer_norm", f"{ours}.self_attn_layer_norm")
        yield from self._linear(f"{within}/linear_0", f"{ours}.self_attn", names, hidden)
        yield from self._linear(f"{within}/linear_1", f"{ours}.self_attn", ["out_proj"], hidden)
        if part == "decoder":
            within = f"{theirs}/attention"
            yield from self._norm(f"{within}/layer_norm", f"{ours}.encoder_attn_layer_norm")
            for number, of in enumerate((names[:1], names[1:], ["out_proj"])):
                yield from self._linear(
                    f"{within}/linear_{number}", f"{ours}.encoder_attn", of, hidden
                )
        yield from self._norm(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
        yield from self._linear(f"{theirs}/ffn/linear_0", ours, ["fc1"], hidden, inner)
        yield from self._linear(f"{theirs}/ffn/linear_1", ours, ["fc2"], inner)

    def _norm(self, theirs: str, ours: str) -> Iterator[MadeTensor]:
        yield from self._made(f"{theirs}/gamma", (self.hidden,), [f"{ours}.weight"])
        yield from self._made(f"{theirs}/beta", (self.hidden,), [f"{ours}.bias"])

    def _linear(
        self, theirs: str, ours: str, names: Sequence[str], inputs: int, outputs: int | None = None
    ) -> Iterator[MadeTensor]:
        """outputs: of each of the names."""
        rows = (outputs or self.hidden) * len(names)
        weights = [f"{ours}.{name}.weight" for name in names]
        yield from self._made(f"{theirs}/weight", (rows, inputs), weights)
        biases = [None if name == "k_proj" else f"{ours}.{name}.bias" for name in names]
        yield from self._made(f"{theirs}/bias", (rows,), biases)

    def _made(
        self, name: str, shape: tuple[int, ...], ours: Sequence[str | None]
    ) -> Iterator[MadeTensor]:
        """Equal parts of a variable's rows, each under a name of ours; None: a part left out."""
        variable = self._variable(name)
        self._read.add(name)
        if variable.shape != shape:
            found = f"has shape {list(variable.shape)}, not {list(shape)}"
            raise self.file.error(f"variable {name} {found}, as {_HIDDEN_WORDS} are sized")
        dtype, scale = variable.dtype, None
        if dtype not in FLOATS:
            scale, dtype = self._scale(name, variable), self.float_type
        rows = shape[0] // len(ours)
        for number, own in enumerate(ours):
            if own is not None:
                pieces = partial(self._pieces, variable, scale, number * rows, rows)
                yield MadeTensor(own, dtype, (rows, *shape[1:]), pieces)

    def _scale(self, name: str, variable: Ct2Variable) -> "np.ndarray[Any, Any]":
        """Return the scale of each row, float32.

        Raises CheckpointError for a format that is not known.
        """
        import numpy as np

        scale = self.file.variables.get(f"{name}_scale")
        rows = variable.shape[0]
        wanted: dict[str, tuple[tuple[int, ...], ...]] = {"I8": ((rows,),), "I16": ((), (1,))}
        if variable.dtype not in wanted or not name.endswith("/weight"):
            known = f"{', '.join(FLOATS)}, and weights of I8 and I16"
            raise self.file.error(f"variable {name} is of type {variable.dtype}; known are {known}")
        if scale is None or scale.dtype != "F32" or scale.shape not in wanted[variable.dtype]:
            found = "none" if scale is None else f"{scale.dtype} {list(scale.shape)}"
            shapes = f"F32 {list(wanted[variable.dtype][0])}"
            raise self.file.error(
                f"variable {name} is {variable.dtype} with a scale that is {found}, not {shapes}"
            )
        values = np.frombuffer(self.file.content(scale), "<f4")
        if not (np.isfinite(values) & (values > 0)).all():
            raise self.file.error(f"variable {name}_scale holds numbers that are not above 0")
        return np.broadcast_to(values, (rows,))

    def _pieces(
        self,
        variable: Ct2Variable,
        scale: "np.ndarray[Any, Any] | None",
        first: int,
        rows: int,
    ) -> Iterator[bytes]:
        """The bytes of rows, quantized ones as numbers of `float_type`."""
        row_bytes = variable.num_bytes // variable.shape[0]
        step = max(1, _PIECE_BYTES // row_bytes)
        for row in range(first, first + rows, step):
            count = min(step, first + rows - row)
            content = self.file.content(variable, row * row_bytes, count * row_bytes)
            if scale is not None:
                content = self._numbers(content, variable.dtype, scale[row : row + count])
            yield content

    def _numbers(self, content: bytes, dtype: str, scale: "np.ndarray[Any, Any]") -> bytes:
        import numpy as np

        kind = f"<i{BYTES_BY_DTYPE[dtype]}"
        codes = np.frombuffer(content, kind).astype("<f4").reshape(len(scale), -1)
        numbers = codes / scale[:, None]
        if self.float_type == "F32":
            return bytes(numbers.tobytes())
        if self.float_type == "F16":
            return bytes(numbers.astype("<f2").tobytes())
        # to the nearest number of 16 bits, and of two to the even one
        bits = numbers.view("<u4")
        return bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes())

    def _variable(self, name: str) -> Ct2Variable:
        found = self.file.variables.get(name)
        if found is None:
            raise self.file.error(f"variable {name} is missing")
        return found

    def _matrix(self, name: str) -> tuple[int, int]:
        shape = self._variable(name).shape
        if len(shape) != 2 or not all(shape):
            raise self.file.error(f"variable {name} has shape {list(shape)}, not that of a matrix")
        return shape[0], shape[1]

    def _number(self, name: str) -> int:
        variable = self._variable(name)
        if variable.shape or variable.dtype not in ("I8", "I16", "I32"):
            raise self.file.error(f"{name} is not a whole number")
        return int.from_bytes(self.file.content(variable), "little", signed=True)
