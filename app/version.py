"""The version, in one place: the package's metadata, `/version` and the console read it here."""

VERSION = "0.1.0"
