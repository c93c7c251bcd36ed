"""`%%kernel`: write CUDA C++ in a notebook's cell and call it from the next one.

    %%kernel
    __global__ void scale(const float* x, float* y, float by, int n) { ... }

    scale[grid, block](x, y, 2.0, n)

The cell is compiled for the machine at hand, and the kernel becomes a `CudaKernel` of its name. CUDA tensors run on
the GPU, CPU tensors on the SIMT machine; `simt.observe(scale[grid, block], x, y, 2.0, n)` counts.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from nanoqwen import simt
from nanoqwen.kernels.launch import INCLUDE, Program

_SCALARS = {
    **dict.fromkeys(("int", "int32_t", "signed", "signed int"), "i"),
    **dict.fromkeys(("unsigned", "unsigned int", "uint32_t"), "u"),
    **dict.fromkeys(("long long", "long long int", "int64_t"), "l"),
    "float": "f",
}
_RANGES = {"i": (-(2**31), 2**31 - 1), "u": (0, 2**32 - 1), "l": (-(2**63), 2**63 - 1)}
_WORDS = {"i": "an int", "u": "an unsigned int", "l": "a long long", "f": "a number"}
_INSTEAD = {
    "double": "float",
    "bool": "int",
    "long": "long long",
    "size_t": "long long",
    "unsigned long long": "long long",
    "uint64_t": "long long",
}
# What a pointer points to, and the tensors that hold such values. Others (uint4*, void*) take any tensor.
_POINTEES = {
    "float": (torch.float32,),
    "double": (torch.float64,),
    **dict.fromkeys(("half", "__half"), (torch.float16,)),
    **dict.fromkeys(("nv_bfloat16", "__nv_bfloat16"), (torch.bfloat16,)),
    **dict.fromkeys(("int", "int32_t"), (torch.int32,)),
    **dict.fromkeys(("unsigned", "unsigned int", "uint32_t"), (torch.int32, torch.uint32)),
    **dict.fromkeys(("long long", "int64_t"), (torch.int64,)),
    **dict.fromkeys(("unsigned char", "uint8_t"), (torch.uint8,)),
    **dict.fromkeys(("signed char", "int8_t"), (torch.int8,)),
}


# Headers of C and C++. A GPU's compiler in a notebook has none of them, though a CPU's has.
_STANDARD_HEADER = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*[<\"](?P<header>[a-z_]+|(?:assert|complex|ctype|errno|fenv|float|inttypes|iso646|"
    r"limits|locale|math|setjmp|signal|stdalign|stdarg|stdatomic|stdbool|stddef|stdint|stdio|stdlib|string|tgmath|"
    r"threads|time|uchar|wchar|wctype)\.h)[>\"]",
    re.M,
)
_BOUNDS = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"


class KernelError(simt.Told, Exception):
    """A cell's kernel that cannot be made."""


class NotCompiled(KernelError, NotImplementedError):
    """A kernel is used whose cell did not compile."""


class WrongType(simt.Told, TypeError):
    """A call's shape, or one of its arguments, is of a type that the kernel does not take, or their number is."""


class WrongValue(simt.Told, ValueError):
    """A call's shape, or one of its arguments, has a value that the kernel cannot take."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: its name, its type as written, its letter (see `Program`)."""

    name: str
    type: str
    letter: str
    pointee: str = ""
    writable: bool = False


@dataclass(frozen=True)
class Signature:
    """A kernel as its source declares it.

    `template` holds the names of its template parameters; `closed` says whether its braces match.
    """

    name: str
    parameters: tuple[Parameter, ...]
    template: tuple[str, ...]
    body: str
    closed: bool = True


def signatures(text: str) -> list[Signature]:
    """The kernels that a source defines, in order.

    Raises:
        KernelError: a parameter of a type that a cell's kernel cannot take; the message names it and what to write.
    """
    plain = _without_comments(text)
    braces = _without_strings(plain)
    found = []
    head = re.compile(
        r"(?:template\s*<(?P<template>[^{};]*?)>\s*)?(?:extern\s*\"C\"\s*)?(?:static\s+)?__global__\s+"
        rf"{_BOUNDS}void\s+{_BOUNDS}"
        r"(?P<name>\w+)\s*\((?P<params>[^{};]*)\)\s*\{",
        re.S,
    )
    for match in head.finditer(plain):
        template = tuple(part.split("=")[0].split()[-1] for part in _split(match["template"] or ""))
        end = _closing(braces, match.end())
        parameters = tuple(_parameter(match["name"], part, template) for part in _split(match["params"]))
        found.append(Signature(match["name"], parameters, template, text[match.end() : end], end < len(text)))
    return found


def names(text: str) -> list[str]:
    """What a cell calls its kernels, even where they cannot be parsed."""
    return re.findall(rf"__global__\s+{_BOUNDS}\w+\s+{_BOUNDS}(\w+)", _without_comments(text))


def _without_comments(text: str) -> str:
    """The source with comments blanked, every character still at its place."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)


def _without_strings(text: str) -> str:
    """The source with what is quoted blanked, every other character still at its place: a '{' in it is no brace."""
    return re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', lambda m: " " * len(m[0]), text)


def _closing(text: str, start: int) -> int:
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if not depth:
            return i
    return len(text)


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for char in text:
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(char, 0)
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip() and part.strip() != "void"]


def _parameter(kernel: str, text: str, template: Sequence[str]) -> Parameter:
    words = re.sub(r"\b(?:__restrict__|__restrict|volatile)\b", " ", re.split(r"[=\[]", text)[0])
    name = re.search(r"(\w+)\s*$", words)
    before = words[: name.start()] if name else words
    if not name or not before.strip():
        raise KernelError(f"{kernel}: the parameter '{text}' has no name or no type; write for instance 'int rows'")
    kind = " ".join(before.replace("*", " * ").split())
    stars, constant = kind.count("*"), bool(re.search(r"\bconst\b[^*]*\*", kind))
    bare = " ".join(w for w in kind.replace("*", " ").split() if w not in ("const", "struct"))
    where = f"{kernel}: parameter {name[1]} is '{kind}'"
    if "&" in kind or stars > 1 or "[" in text:
        wanted = f"{bare.strip(' &')}* {name[1]}"
        raise KernelError(f"{where}; a kernel takes numbers and pointers to arrays: write '{wanted}'")
    if stars:
        return Parameter(name[1], kind, "p", bare, not constant)
    if bare in _SCALARS:
        return Parameter(name[1], kind, _SCALARS[bare])
    if bare in template:
        raise KernelError(f"{where}, a type of the template, by value; write '{bare}*', or int or float")
    instead = f": use {_INSTEAD[bare]}" if bare in _INSTEAD else ""
    kinds = "a pointer, int, unsigned, long long or float"
    raise KernelError(f"{where}, which cannot be passed; it must be {kinds}{instead}")


class CudaKernel:
    """A kernel written in a cell: `k[grid, block](…)` or `k[grid, block, shared_bytes](…)` launches it.

    Args of the call are the kernel's parameters: tensors (or None) for pointers, numbers for the rest. The tensors'
    device chooses the machine.
    """

    def __init__(self, program: Program, instance: str, signature: Signature):
        self.program, self.instance, self.signature = program, instance, signature
        self.__name__ = signature.name
        given = _split(instance.partition("<")[2].rpartition(">")[0])
        self._types = dict(zip(signature.template, given, strict=False))

    def __repr__(self) -> str:
        return f"<kernel {self.instance}({', '.join(p.name for p in self.signature.parameters)})>"

    @property
    def unsolved(self) -> bool:
        """A stub: a body of comments alone, with a TODO in it."""
        return "TODO" in self.signature.body and not _without_comments(self.signature.body).strip()

    def __getitem__(self, shape: object) -> Callable[..., None]:
        if not isinstance(shape, tuple) or len(shape) not in (2, 3):
            raise WrongType(f"{self.__name__}[…] takes grid and block, and shared bytes if any, got {shape!r}")
        return lambda *args: self.launch(shape[0], shape[1], args, *shape[2:])

    def __call__(self, *args: object) -> None:
        raise WrongType(f"say how many blocks, and threads a block: {self.__name__}[grid, block](…)")

    def launch(
        self, grid: object, block: object, args: Sequence, shared_bytes: int = 0, outputs: Sequence[int | str] = ()
    ) -> None:
        """Run it over `grid` blocks of `block` threads.

        Args:
            args: one for each parameter.
            shared_bytes: of the `extern __shared__` array.
            outputs: parameters that are only written: an observed launch fills them with NaN first, and reports what
                stays unwritten.

        Raises:
            TypeError, ValueError: an argument or a shape that does not fit; nothing has run.
            NotImplementedError: the body is still empty.
            nanoqwen.simt.LaunchError: it could not go on.
        """
        if self.unsolved:
            raise NotImplementedError(f"{self.__name__}: its body is still to be written")
        device = self._check(args)
        try:
            self.program.launch(self.instance, device, grid, block, args, shared_bytes=shared_bytes, outputs=outputs)
        except simt.CompileError as error:
            raise KernelError(str(error)) from None
        except TypeError as error:
            raise WrongType(str(error)) from None
        except ValueError as error:
            raise WrongValue(str(error)) from None

    def _check(self, args: Sequence) -> torch.device:
        parameters = self.signature.parameters
        if len(args) != len(parameters):
            names = ", ".join(p.name for p in parameters)
            raise WrongType(f"{self.__name__} takes {len(parameters)} arguments ({names}), got {len(args)}")
        device = None
        for parameter, value in zip(parameters, args, strict=True):
            label = f"{self.__name__}: {parameter.name}"
            if parameter.letter == "p":
                if value is not None:
                    self._check_tensor(label, parameter, value, device)
                    device = value.device
            elif parameter.letter == "f":
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise WrongType(f"{label} must be a number, got {type(value).__name__}")
            else:
                low, high = _RANGES[parameter.letter]
                if isinstance(value, bool) or not isinstance(value, int):
                    raise WrongType(f"{label} must be {_WORDS[parameter.letter]}, got {type(value).__name__} {value!r}")
                if not low <= value <= high:
                    raise WrongValue(f"{label} is {value}; {_WORDS[parameter.letter]} holds {low} to {high}")
        return device or torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def _check_tensor(self, label: str, parameter: Parameter, value: object, device: torch.device | None) -> None:
        if not isinstance(value, Tensor):
            raise WrongType(f"{label} must be a tensor, got {type(value).__name__}")
        kind = self._types.get(parameter.pointee, parameter.pointee)
        if (dtypes := _POINTEES.get(kind)) and value.dtype not in dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            have = str(value.dtype).removeprefix("torch.")
            raise WrongType(f"{label} points to {kind}, so its tensor must be {wanted}; it is {have}")
        if device is not None and value.device != device:
            raise WrongValue(f"{label} is on {value.device}, the tensors before it on {device}")
        if not value.is_contiguous():
            raise WrongValue(f"{label} is not contiguous (strides {value.stride()}); pass .contiguous()")


class UncompiledKernel(CudaKernel):
    """Stands for a kernel until its cell compiles, so that no earlier one of its name is taken for it."""

    def __init__(self, name: str):
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<kernel {self.__name__}, whose cell did not compile>"

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotCompiled(f"{self.__name__}: its cell did not compile; mend that cell and run it again")

    __getitem__ = __call__ = launch = _refuse
    program = instance = signature = unsolved = property(_refuse)


def make(text: str, wanted: str = "", first_line: int = 2) -> list[CudaKernel]:
    """The kernels of a cell's text, compiled for the machine at hand.

    Args:
        wanted: template instances, such as `gemv<float>`, apart by blanks; those that are no templates need no naming.
        first_line: the text's first line in the cell, for messages.

    Raises:
        KernelError: no kernel, a parameter that cannot be passed, or the compiler's words with the cell's line.
    """
    found = {signature.name: signature for signature in signatures(text)}
    plain = _without_comments(text)
    if not found and "__global__" in plain:
        raise KernelError(
            "a `__global__` is here, but not as '__global__ void name(parameters) { … }': "
            "is a ')' missing, or is it not void?"
        )
    if not found:
        raise KernelError("there is no kernel in this cell; it must hold '__global__ void name(parameters) { … }'")
    if header := _STANDARD_HEADER.search(plain):
        ours = ", ".join(sorted(path.name for path in INCLUDE.glob("*.cuh")))
        raise KernelError(
            f"line {first_line + plain.count(chr(10), 0, header.start('header'))} of this cell includes "
            f"{header['header']}: a kernel includes no header of the standard library (NVRTC has none); "
            f"csrc/include has small ones ({ours})"
        )
    named = {}
    for instance in re.findall(r"\w+\s*(?:<[^>]*>)?", wanted):
        name = instance.partition("<")[0].strip()
        if name not in found:
            raise KernelError(f"this cell has no kernel {name!r}; it has {', '.join(found)}")
        if name in named:
            raise KernelError(f"{name} is asked for twice; a name in the notebook can hold one of its instances")
        named[name] = instance.strip()
    for name, signature in found.items():
        instance = named.setdefault(name, name)
        if signature.template and "<" not in instance:
            types = ", ".join("float" for _ in signature.template)
            raise KernelError(f"{name} is a template; name the instance you want: %%kernel {name}<{types}>")
    program = Program(
        text,
        {named[name]: "".join(p.letter for p in signature.parameters) for name, signature in found.items()},
        filename=next(iter(found)),
        first_line=first_line,
    )
    try:
        program.compile(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except simt.CompilerNotFound as error:
        raise KernelError(str(error)) from None
    except simt.CompileError as error:
        raise KernelError(_in_the_cells_words(error, program.filename, text, list(found.values()))) from None
    return [CudaKernel(program, named[name], signature) for name, signature in found.items()]


def _in_the_cells_words(error: simt.CompileError, filename: str, text: str, found: Sequence[Signature]) -> str:
    # A brace that is never closed is noticed by compilers much later, in files that the reader does not know.
    for signature in found:
        if not signature.closed:
            return f"{signature.name}: a '{{' of this kernel is never closed"
    braces = _without_strings(_without_comments(text))
    if error.file != filename and braces.count("{") > braces.count("}"):
        return f"{filename}: a '{{' of this cell is never closed"
    first, *rest = str(error).splitlines()
    if error.line and error.file == filename:
        # What is missing at the end of a line is missed at the start of the next.
        before = ", or the end of the line before" if re.search(r"expected (?:an? )?.{0,8}[‘'\"];", first) else ""
        first += f" (line {error.line} of this cell{before})"
    return "\n".join([first, *rest])


def register(shell) -> None:
    """Teach an IPython shell the magic; a second time does nothing new."""

    def kernel(line: str, cell: str) -> None:
        """Compile the CUDA C++ of this cell; each of its kernels can then be called by its name."""
        machine = "GPU" if torch.cuda.is_available() else "SIMT machine"
        for name in names(cell):
            shell.user_ns[name] = UncompiledKernel(name)
        for made in make(cell, line):
            shell.user_ns[made.__name__] = made
            given = ", ".join(p.name for p in made.signature.parameters)
            print(f"{made.instance} compiled for the {machine}; call it as {made.__name__}[grid, block]({given})")

    shell.register_magic_function(kernel, magic_kind="cell", magic_name="kernel")
