"""The graph of imports finds circles and imports to a higher floor."""

from pathlib import Path

from scripts.import_graph import circles, import_graph, upward

CONTRACT = """
[[tool.importlinter.contracts]]
name = "floors"
type = "layers"
containers = ["house"]
layers = ["roof", "walls | stairs", "cellar"]
ignore_imports = ["house.cellar.pump -> house.roof.*"]
"""


def write(root: Path, **texts: str) -> None:
    (root / "pyproject.toml").write_text(CONTRACT)
    for name, text in texts.items():
        path = root / "house" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_circle_is_found_through_functions_and_packages(tmp_path: Path) -> None:
    write(
        tmp_path,
        roof="import house.walls",
        walls="def build():\n    from house import stairs",
        stairs="from house.cellar import pump",
        cellar__pump="from house.walls import build",
    )
    assert circles(import_graph(tmp_path, "house")) == [
        ["house.cellar.pump", "house.stairs", "house.walls"]
    ]


def test_an_import_to_a_higher_floor_is_found_unless_a_contract_lists_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        roof__tiles="from house.walls import brick",
        walls="from house import stairs",
        stairs="from house.roof import tiles",
        cellar__pump="from house.roof import tiles",
    )
    assert upward(import_graph(tmp_path, "house"), tmp_path) == [
        "house.stairs imports house.roof.tiles, which is above it"
    ]
