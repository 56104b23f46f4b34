"""SHA-1 of each script as the server names it. Written by ``scripts/digests``; a test compares."""

DIGESTS: dict[str, str] = {
    "admit": "1517a96d19ad4b20e9627101af30940c7086b4f4",
    "cancel": "2b0ca39a4b17483174479e3c185907e4382f8cb4",
    "enqueue": "e978f3475606262a25abe295dcdffb270a48bfce",
    "flush": "a7ffbf3f00321de6c53814abbe49518897c3f815",
    "prune_dead": "181595c16b85391a2063c435c0124590b1bebcc1",
    "purge_dead": "14e63a96a005253ac6e9b8aaf4c71154eabf0747",
    "release": "0c4d35fbbcd643df94c7632a94b7201c7e79daa7",
    "renew": "cef59c8792abecb64ac426e53305581878e2ed5d",
    "reserve": "3d41a6529b6e770deb36ec4cc8a7ec52347fc2fe",
    "retry": "8c32bf1130566233d378c7f8c5c746c23946a78e",
    "retry_dead": "a432f7e660769ee0bc46449d98c5c88b5d62a0b5",
    "settle": "8cd1ccb420360db4427221e49ce1e04bc258725a",
    "step": "80a3747acd69b80f07e72da2e8d879a186381b0c",
}
