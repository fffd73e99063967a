"""A plugin whose own dependency is missing."""

import a_library_that_is_not_installed  # noqa: F401
