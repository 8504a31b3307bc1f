"""How ranks exchange data: links of several kinds, groups, collectives and communicators."""
