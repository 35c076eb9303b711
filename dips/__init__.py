"""Di-PS: several training clusters, far apart and unequal, train one large language model together."""

__version__ = "0.1.0"
