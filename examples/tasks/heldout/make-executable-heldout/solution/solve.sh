#!/bin/bash
chmod +x place.sh
