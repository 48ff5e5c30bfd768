"""Version of this source, which may be newer than the metadata of an editable install."""

__version__ = "0.4.0.dev5"
