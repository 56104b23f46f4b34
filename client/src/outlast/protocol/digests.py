"""SHA-1 of each script as the server names it. Written by ``scripts/digests``; a test compares."""

DIGESTS: dict[str, str] = {
    "admit": "1517a96d19ad4b20e9627101af30940c7086b4f4",
    "cancel": "36e910597d09278d1b73258eafcc52699803aa61",
    "enqueue": "e978f3475606262a25abe295dcdffb270a48bfce",
    "flush": "a7ffbf3f00321de6c53814abbe49518897c3f815",
    "prune_dead": "6af5459b1ed657b4a1ced6bf83a6019fe7e1156c",
    "purge_dead": "d6b8e6abfd7764e312196a4936405e2061c968a5",
    "release": "da9a1e7707a47044bc74cdddd8c68679e86fbb63",
    "renew": "cef59c8792abecb64ac426e53305581878e2ed5d",
    "reserve": "4b18b5ea1d1b817773fcaabd6ad398872f650794",
    "retry": "a35b9a0ebeca7d58174a3c865e084a6fa8d4cf07",
    "retry_dead": "a432f7e660769ee0bc46449d98c5c88b5d62a0b5",
    "settle": "57d83947a417be3801b20c117d884984a849e81c",
    "step": "80a3747acd69b80f07e72da2e8d879a186381b0c",
}
