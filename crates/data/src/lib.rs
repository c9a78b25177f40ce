//! Backing files of one target: the one door to the media.
