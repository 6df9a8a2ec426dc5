"""stub"""


def save(offloaded, path, extra):
    raise NotImplementedError


def load(offloaded, path):
    raise NotImplementedError


def export(offloaded, folder):
    raise NotImplementedError
