"""`sgl_kernel` where it is not installed; see absent_module."""

from absent_module import become_absent

become_absent(__name__)
