"""Installed as ``hydra_plugins/das_verl_plugin.py``: makes ``configs/`` visible to every Hydra command."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class DasVerlSearchPath(SearchPathPlugin):
    """Adds the folder that holds ``das/on.yaml`` and ``platform/cpu.yaml`` to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder; called by Hydra when it starts."""
        import das_verl
        from das_verl.verl.resolver import register_resolver

        register_resolver()
        package = Path(das_verl.__file__).parent
        # In a checkout the folder stands beside the package, in a wheel inside it.
        configs = next(p for p in (package.parent / "configs", package / "configs") if (p / "das").is_dir())
        search_path.append(provider="das-verl", path=f"file://{configs}")
