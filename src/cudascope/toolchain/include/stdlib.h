#pragma once
// NVRTC has malloc and free built in
