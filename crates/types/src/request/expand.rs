//! The expansion of the table of requests: the enum, its encoding, and the properties of each request.
//!
//! One entry reads `Name = number: class effect home [+ flag ...] -> Reply { field: Type [as Codec], ... }`. The fields
//! stand in the order in which they are encoded. A field names its codec (`fields.rs`) if its type has more than one
//! encoding, or its values have bounds. With `by module` in front of `->`, `module::put` and `module::get` encode the
//! fields instead.

/// The codec of a field: the one it names, or else its type.
macro_rules! codec {
    ($type:ty) => {
        $type
    };
    ($type:ty, $codec:ty) => {
        $codec
    };
}

/// Writes a request's fields.
macro_rules! put_fields {
    ($w:ident;; $($field:ident: $type:ty $(as $codec:ty)?,)*) => {
        $(<codec!($type $(, $codec)?) as Field<'a>>::put(&mut $w, $field)?;)*
    };
    ($w:ident; $module:ident; $($field:ident: $type:ty $(as $codec:ty)?,)*) => {
        $module::put(&mut $w, $($field),*)?
    };
}

/// Reads a request's fields.
macro_rules! get_fields {
    ($r:ident; $variant:ident;;) => { Request::$variant };
    ($r:ident; $variant:ident;; $($field:ident: $type:ty $(as $codec:ty)?,)+) => {
        Request::$variant { $($field: <codec!($type $(, $codec)?) as Field<'a>>::get(&mut $r)?),* }
    };
    ($r:ident; $variant:ident; $module:ident; $($field:ident: $type:ty $(as $codec:ty)?,)+) => {{
        let ($($field),+) = $module::get(&mut $r)?;
        Request::$variant { $($field),+ }
    }};
}

/// Where a request may come from.
macro_rules! class {
    (client) => {
        Class::Client
    };
    (data) => {
        Class::Data
    };
    (step) => {
        Class::Step
    };
    (peer) => {
        Class::Peer
    };
}

/// Whether a request may change the shard.
macro_rules! changes {
    (read) => {
        false
    };
    (change) => {
        true
    };
}

/// The node that a request is sent to.
macro_rules! home {
    (anywhere) => {
        None
    };
    (root) => {
        Some(Ino::ROOT.birth_node())
    };
    (at($field:ident)) => {
        Some($field.home_node())
    };
}

macro_rules! requests {
    ($(
        $(#[doc = $doc:literal])*
        $variant:ident = $number:literal: $class:ident $effect:ident $home:ident $(($at:ident))? $(+ $flag:ident)*
            $(by $module:ident)? -> $reply:literal
        $({ $($(#[doc = $field_doc:literal])* $field:ident: $type:ty $(as $codec:ident)?,)+ })?
    )+) => {
        /// A request. Names are of one component: 1 to 255 bytes without `/` and NUL, and not `.` or `..`.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Request<'a> {
            $(
                $(#[doc = $doc])*
                #[doc = concat!("\n\n→ ", $reply)]
                $variant $({ $($(#[doc = $field_doc])* $field: $type,)+ })?,
            )+
        }

        /// All requests, in the order of the table.
        pub const REQUESTS: &[RequestInfo] = &[$(
            RequestInfo {
                name: stringify!($variant),
                number: $number,
                class: class!($class),
                changes: changes!($effect),
                home: concat!(stringify!($home) $(, " ", stringify!($at))?),
                flags: &[$(stringify!($flag)),*],
                fields: &[$($((stringify!($field), stringify!($type))),+)?],
                reply: $reply,
                doc: concat!($($doc),*),
            },
        )+];

        impl<'a> Request<'a> {
            /// Its entry of the table.
            #[inline]
            pub const fn info(&self) -> &'static RequestInfo {
                &REQUESTS[self.index()]
            }

            /// Its position in the table.
            #[inline]
            const fn index(&self) -> usize {
                #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
                enum Index { $($variant),+ }
                match self { $(Request::$variant { .. } => Index::$variant as usize,)+ }
            }

            /// The number that stands for the request in a message.
            #[inline]
            pub const fn number(&self) -> u8 {
                match self { $(Request::$variant { .. } => $number,)+ }
            }

            pub(super) fn put(&self, writer: &mut Writer<'_>) -> Result<(), Code> {
                let mut w = writer;
                match *self {
                    $(Request::$variant $({ $($field),+ })? => {
                        put_fields!(w; $($module)?; $($($field: $type $(as $codec)?,)+)?);
                    })+
                }
                Ok(())
            }

            pub(super) fn get(number: u8, reader: &mut Reader<'a>) -> Result<Request<'a>, Code> {
                let mut r = reader;
                Ok(match number {
                    $($number => get_fields!(r; $variant; $($module)?; $($($field: $type $(as $codec)?,)+)?),)+
                    _ => return Err(Code::Malformed),
                })
            }

            /// The node that serves the request; none for the node that receives it.
            #[inline]
            pub fn node(&self) -> Option<NodeId> {
                #[allow(unused_variables)]
                match *self {
                    $(Request::$variant $({ $($field),+ })? => home!($home $(($at))?),)+
                }
            }
        }
    };
}
