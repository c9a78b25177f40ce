//! The media of the study.

/// A medium of the study, and the profile that stands for it.
pub(super) struct Media {
    pub(super) name: &'static str,
    pub(super) profile: &'static str,
}

pub(super) const MEDIA: [Media; 3] = [
    Media { name: "HDD", profile: "hdd" },
    // The paper's, of 2012: single-level cells.
    Media { name: "SSD", profile: "slc" },
    Media { name: "NVM", profile: "pcram" },
];

/// NVM that is not slower than the page cache is, for the part about it.
pub(super) const FAST: Media = Media { name: "fast NVM", profile: "optane" };
