"""Pages of the website that are not files in docs/: README, CONTRIBUTING, CHANGELOG and the API reference.

mkdocs calls the functions `on_…` of this file, and griffe the methods of its class; `tools/mkdocs.yml`
names both. The API reference has a page for each package and each family, and one for the commands.
"""

import ast
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
TOP_LEVEL = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
SOURCE_LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\(\.\./(?P<file>maxlp/[\w/]+)\.py#L\d+\)")
RST_TABLE = re.compile(r"(?m)^=+ =[= ]*\n(?:.*\n)*?=+ =[= ]*\n(?:.*\n)*?=+ =[= ]*$")
STYLE = ".md-grid {max-width: 76rem}\n"  # for wide tables


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the API reference to the navigation."""
    pages = [{name: f"api/{name}.md"} for name in api_pages()]
    config.nav = [*(config.nav or []), {"API reference": pages}]
    config.extra_css = ["style.css"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated files."""
    texts = {f"api/{name}.md": text for name, text in api_pages().items()}
    texts |= {page: _seen_from_docs((ROOT / source).read_text()) for page, source in TOP_LEVEL.items()}
    for path, text in {**texts, "style.css": STYLE}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to lines of the code into links to the API reference."""

    def to_reference(link: re.Match[str]) -> str:
        module = link["file"].replace("/", ".").removesuffix(".__init__")
        return f"[`{link['name']}`][{module}.{link['name']}]"

    for name, source in TOP_LEVEL.items():
        markdown = markdown.replace(f"](../{source})", f"]({name})")
    return SOURCE_LINK.sub(to_reference, markdown)


def _seen_from_docs(markdown: str) -> str:
    """A top-level page, with its links relative to docs/."""
    for page, source in TOP_LEVEL.items():
        markdown = markdown.replace(f"]({source})", f"]({page})")
    return markdown.replace("](docs/", "](")


# --- the API reference ----------------------------------------------------------------------------------


def api_pages() -> dict[str, str]:
    """Text of each page, by name."""
    root = ROOT / "maxlp"
    commands = [_entry(path) for path in sorted(root.glob("*.py")) if path.stem[0] != "_"]
    pages = {"commands": "\n".join(["# Commands", "", *commands])}
    packages = sorted(path.parent for path in root.glob("*/__init__.py"))
    families = [
        package for package in sorted((root / "families").iterdir()) if (package / "__init__.py").exists()
    ]
    for package in packages:
        pages[package.name] = _package_page(package, exclude=families)
    for family in families:
        pages[f"families.{family.name}"] = _package_page(family)
    return dict(sorted(pages.items()))


def _package_page(package: Path, exclude: list[Path] | None = None) -> str:
    """The reference of all modules of a package but those in some of its folders."""
    paths = [path for path in sorted(package.rglob("*.py")) if path != package / "__init__.py"]
    paths = [path for path in paths if not any(path.is_relative_to(folder) for folder in exclude or [])]
    own = _entry(
        package / "__init__.py", members=_defined(package / "__init__.py"), show_root_heading=False
    )
    return "\n".join([f"# {_module(package)}", "", own, *map(_module_entry, paths)])


def _module_entry(path: Path) -> str:
    # Names that a package imports from its modules are documented there.
    return _entry(path, members=_defined(path)) if path.name == "__init__.py" else _entry(path)


def _entry(path: Path, **options: Any) -> str:
    lines = [f"      {name}: {value}" for name, value in options.items()]
    return "\n".join([f"::: {_module(path)}", *(["    options:"] if lines else []), *lines, ""])


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _defined(path: Path) -> list[str]:
    """The public names that a file defines."""
    names = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


class Docstrings(griffe.Extension):
    """Shows the docstrings of a project that are not Markdown everywhere."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Makes code blocks of reST's literal blocks and tables."""
        if obj.docstring is not None:
            text = re.sub(r"(?m)^::$", "", obj.docstring.value)
            text = re.sub(r"(?m)::$", ":", text)
            obj.docstring.value = RST_TABLE.sub(lambda table: re.sub("(?m)^", "    ", table[0]), text)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Leaves out fields without a docstring of their own: the docstring of their class lists them."""
        for cls in _classes(pkg):
            for name, member in list(cls.members.items()):
                if member.is_attribute and not member.has_docstring:
                    del cls.members[name]


def _classes(module: griffe.Object) -> list[griffe.Object]:
    found = []
    for member in module.members.values():
        if not member.is_alias and (member.is_module or member.is_class):
            found += [member] if member.is_class else []
            found += _classes(member)
    return found
