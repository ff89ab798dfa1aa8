"""The pure functions of a sync round: mirrors of the core's files of the same name."""
