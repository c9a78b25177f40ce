//! The media of the study.

/// A medium of the study, and the profile that stands for it.
pub(super) struct Media {
    pub(super) name: &'static str,
    pub(super) profile: &'static str,
}

pub(super) const MEDIA: [Media; 3] = [
    Media { name: "HDD", profile: "hdd" },
    Media { name: "SSD", profile: "ssd" },
    Media { name: "NVM", profile: "pcram" },
];
