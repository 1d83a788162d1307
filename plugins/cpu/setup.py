"""Says that the package holds a library of this machine, so that its wheel is named after it."""

from setuptools import Distribution, setup


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(distclass=NativeDistribution)
